"""Ahead-of-time autograd: from a torch-level graph to functional ATen graphs, forward and backward.

    takes    a Capture's graph and fake inputs (dynamo/result.py)
    gives    AotResult: the graph at every level, joint graph, forward and backward graph, Partition
    decides  which operators become which; what the backward finds saved, what it computes again

Read autograd.py first, which is the room's table of contents, then result.py.
"""
