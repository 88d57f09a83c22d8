"""Capture: from a Python frame to a torch-level FX graph, guards, side effects and breaks.

    takes    a Python frame: bytecode, locals, globals
    gives    Capture: a graph of torch functions, guards, side effects, breaks with their reasons
    decides  what is captured, what Python does itself, what a later call must fulfil to reuse it

Read result.py first, then capture.py. The way through the room for a reader: what runs the bytecode, then
what runs in its place later, then where the two alternate. A call comes in at `dispatch`, which asks its
entries and calls `capture` if none fits.

    result         what capture gives: Source, Guard, GraphBreak, Miss, Capture

    Running bytecode on symbols
    bytecode       one instruction stream for all versions of CPython
    interpreter    the stack machine: frames, exceptions, generators, and the names of the operations
    opcodes        what each instruction does to the stack
    variables      what is known of the objects that it meets
    recorder       torch calls become nodes of an FX graph; sizes: those with symbols
    world          what is known while a frame is captured: frames, sources and guards, writes, the graph
    outside, attributes, containers, calls
                   what Python's operations mean there, each a function of the world: reads and writes of
                   what existed before, attributes, operators and containers, calls
    builtins, library
                   what calls of particular functions mean; refusals: what is left to Python by name
    capture        runs a frame through all this, and keeps what is needed to run it again

    Running what was captured
    guards         guards as Python text; which one failed, and why
    rebuild        the frame's result and its writes, from the graph's outputs
    modes          grad mode and autocast: what a frame may leave changed; undoing what a graph that
                   raised had changed
    entry          guards, graph and result as one generated function
    dispatch       what `mc.compile` returns: entries, else capture, else eager; module: its wrappers

    Where capture ends before the frame does
    breaks         where to cut a frame, and how it goes on
    continuation   the two functions that a cut needs, made from bytecode by assembler

    Below what runs in eager
    hook           eager code asks about each function that it calls (frame_hook.c); a plug-in may answer

The corridor beyond sees `result` only. Each module's head names its counterpart in the real compiler.
"""
