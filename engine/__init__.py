"""The reference deployment and the draft model: everything that computes."""
