"""A run's figures while it goes on, by step.

`gauge` and `timings` take them; `progress` and `writers` show them.
"""
