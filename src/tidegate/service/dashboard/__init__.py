"""The dashboard: a page of our own, and what it is told once a second.

files.py      the page, its styles and scripts, with the header fields that keep them safe
near.py       which keys were denied or are low
history.py    the last five minutes, second by second
panels.py     what the other faces show: sources, budgets, a swarm
overview.py   all of it as JSON, at /v1/overview
"""
