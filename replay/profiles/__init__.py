"""What engines and trainers make of a draft: one of them a file."""
