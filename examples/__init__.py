"""Programs to read, run and copy from; each runs in the tests."""
