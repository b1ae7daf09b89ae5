"""Providers: their files, their hosts and their secrets."""
