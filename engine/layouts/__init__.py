"""How drafts are published: one layout a file."""
