"""Scheduling: a loop body for each buffer, dependencies, fusion, order and memory."""
