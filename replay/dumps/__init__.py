"""Hidden states that other tools wrote, read into a trace."""
