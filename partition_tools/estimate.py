"""Time and memory of a build, and of each rank's training, before either is paid for.

What a build takes follows from the graph's sizes. What training takes hangs on what the parts send each other, which
only an assignment tells: one is made by the method that is asked for.
"""

from __future__ import annotations

from partition_tools.assign import AssignOptions
from partition_tools.graph import Graph

METIS_EDGE = {"kway": 0.8e-6, "recursive": 1.0e-6}
"""Seconds an edge that METIS takes on one core of a 2-core virtual machine; recursive bisection for each level."""


def assign_seconds(graph: Graph, options: AssignOptions) -> float:
    """Seconds that assigning the nodes should take."""
    levels = max(1, (options.parts - 1).bit_length())
    if options.method == "best" and options.parts > 1:  # nine runs of METIS, and rounds of at most so many edges
        return min(options.time_limit, 5 + 9 * METIS_EDGE["recursive"] * levels * graph.num_edges + 30)
    if options.method == "fennel":
        return 1e-7 * options.passes * graph.num_edges
    if options.parts == 1 or not (options.method == "metis" or options.clusters):
        return 1e-7 * (graph.num_edges if options.method == "bfs" else graph.num_nodes)
    recursive = options.scheme == "recursive" or (
        options.scheme == "auto" and options.objective != "volume" and options.parts <= 8
    )
    each = METIS_EDGE["recursive"] * levels if recursive else METIS_EDGE["kway"] * (1 + levels / 6)
    return 0.4 + options.tries * each * graph.num_edges
