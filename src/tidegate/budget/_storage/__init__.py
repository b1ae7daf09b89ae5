"""Where a budget keeps open batches and completed tasks."""
