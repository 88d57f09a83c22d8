"""Scheduling: a loop body for each buffer, dependencies, fusion, order and memory.

    takes    a LoopGraph (lowering/ir.py)
    gives    Schedule: fused nodes in running order, every FusionDecision, the memory plan
    decides  which loop nests become one kernel, their order, whose memory a buffer takes over

Read schedule.py first, then nodes.py.
"""
