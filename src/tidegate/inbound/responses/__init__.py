"""What clients are answered: rate limit headers, denials, and the operator page."""
