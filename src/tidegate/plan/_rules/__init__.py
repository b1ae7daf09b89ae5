"""The rules that a log is replayed against: each kind asks the code that enforces it, in the time of the log."""
