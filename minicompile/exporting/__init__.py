"""Export: a function or module as one graph that stands for itself, without the Python that it came from.

    takes    a function or nn.Module, example arguments, which sizes are dynamic
    gives    Exported: a functional Core ATen graph, its signature, the conditions on its inputs, its state
    decides  what is an input and what is state; which of capture's guards are conditions on arguments, which
             are facts of the moment of export; which declared sizes the program takes as they are

    call        an example call: the function that is captured, which sizes are dynamic
    results     how results are put together from the graph's outputs
    export      `mc.export`: captures once, separates state from inputs, turns guards into conditions
    exported    `Exported`: what it gives, how it is called
    conditions  conditions on arguments, which are Python expressions
    package     `mc.aot_package`: the graph through the corridor, the sources, the C compiler, checksums
    c_wrapper   the C function that runs the kernels; c/ has what is the same in all packages
    load        `mc.load_package`: checked, then called by ctypes
    pictures    how exports and packages look in a notebook

Read exported.py first, then export.py. The room stands above the corridor: it calls capture and AOT, and no
room calls it. (It is called `exporting` since `minicompile.export` is the function.)
The real compiler: torch/export, torch/_export.
"""

from minicompile.ops.display import renderer

renderer.modules.append("minicompile.exporting.pictures")
