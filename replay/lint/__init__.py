"""A draft judged by its files, before anything runs."""
