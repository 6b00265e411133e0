"""A device that is not the CPU, on a machine without one: for tests alone.

It has memory that the host cannot touch, streams that run by themselves and backward on a thread of
its own, as a GPU has, and it checks that every two tasks that touch the same bytes are ordered.
"""
