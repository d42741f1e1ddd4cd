"""The command line: `python -m bench COMMAND ...` runs the file `bench/commands/COMMAND.py`."""

import argparse
import importlib
import os
import sys

COMMANDS = {
    "digits": "train a classifier under Equinox's filter_jit and eqxjit's; compare bits and speed",
    "calls": "time warm calls of many workloads, compared with the floor, jax.jit and Equinox",
    "shapes": "time calls of one function with several shapes",
    "statics": "time calls with large static values or alternating structures",
    "training": "time training steps, packed and not, compared with other ways to write them",
    "latency": "p50 to p99.9 of small fixed models, compared with ONNX Runtime and PyTorch",
    "serving": "p50 to p99.9 of warm calls while another thread traces and compiles new shapes",
    "downstream": "compare the results of packages built on Equinox, with and without eqxjit",
    "startup": "time imports, first calls, new shapes, ways to start faster, and diagnostics",
    "compare": "run one of these commands with the eqxjit of another checkout and with this one",
    "figures": "write the recorded figures into README, pages and pictures",
    "all": "measure all records again, one after the other, then run `figures`",
}


def main() -> int:
    """Run the chosen command, and return its exit status."""
    listing = "\n".join(f"  {name:10} {purpose}" for name, purpose in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        epilog=f"commands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    # By default JAX reserves most of a GPU's memory for one process, and a command starts others.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Imported only now, because the commands need different packages and different JAX settings.
    return importlib.import_module(f"bench.commands.{chosen.command}").main(chosen.arguments)


if __name__ == "__main__":
    sys.exit(main())
