"""AI batch processing within a budget: a scheduler, and a task server that it polls.

python -m examples.budget.task_server 8080                            a server with 60 tasks
RATE_LIMIT_ENABLED=true RATE_LIMIT_PER_MINUTE=20 RATE_LIMIT_PER_DAY=500 CONCURRENCY_LIMIT=5 \
    python -m examples.budget.scheduler http://127.0.0.1:8080         processes them, 20 per minute
tidegate budget --watch                                               in another terminal, with the same variables
"""
