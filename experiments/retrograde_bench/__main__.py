"""`python -m retrograde_bench`: the same as `retrograde bench`."""

from .command import group, measure

group.callback(invoke_without_command=True)(measure)
group()
