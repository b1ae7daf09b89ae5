"""Side by side with other limiters, in one run: `make bench`."""
