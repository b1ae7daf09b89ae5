"""What all packages use: clocks, flows, locks, forks, files, URLs."""
