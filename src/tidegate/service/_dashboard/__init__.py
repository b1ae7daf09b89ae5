"""The dashboard: a web page, and the JSON document that it polls once a second.

static/           the page, its styles and scripts
static_files.py   serves these files, with security headers
overview.py       GET /v1/overview: all data of the page
status.py         the values that it shows: of one process, or of all workers together
history.py        decisions per second and latencies of the last 24 hours
panels.py         panels of other components: sources, budgets, swarm, bus
"""
