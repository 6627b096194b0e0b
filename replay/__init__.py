"""Reading traces: replay, walk, compare, diagnose. Nothing here starts an engine."""
