"""`bench leaf_sizes`: a packed step for several `max_leaf_bytes`, against the step on the tree.

Figures are of the process's CPU time, which other work on the machine hardly changes. Run it with
`XLA_FLAGS=--xla_cpu_multi_thread_eigen=false`, so that no thread waits for another.
"""

import time
from functools import partial

import jax

import eqxjit

from ..harness.measure import Race, options
from ..harness.printing import wide_console
from ..models.training_steps import filtered, packed
from ..models.training_tasks import TASKS


def main(argv: list[str]) -> int:
    """Time and report, task by task."""
    parser = options("leaf_sizes", __doc__, rounds=15)
    parser.add_argument("--kib", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=list(TASKS))
    args = parser.parse_args(argv)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    console = wide_console(150)
    for name in args.only:
        task = TASKS[name]()
        builders = {"tree": partial(filtered, filter_jit=eqxjit.filter_jit)}
        layouts = []
        for kib in args.kib:
            layout = eqxjit.pack(task.model, max_leaf_bytes=1024 * kib).layout
            if layout not in layouts:
                layouts.append(layout)
                builders[f"{kib} KiB"] = partial(packed, max_leaf_bytes=1024 * kib)
        race = Race({way: build(task) for way, build in builders.items()}, clock=time.process_time)
        for _ in range(args.rounds):
            race.round()
        us = race.microseconds()
        figures = [f"{way} {us[way]:.1f} ({us[way] / us['tree']:.3f})" for way in us]
        console.print(f"{name}: {', '.join(figures)} µs (of the tree's)", highlight=False)
    return 0
