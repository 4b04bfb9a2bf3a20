"""Six tasks that were written down before anything ran on them, and eight ways to train on each.

``python -m benchmarks.published sceptic_TASK_ARM`` trains one way on one task.
"""
