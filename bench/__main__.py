"""The command line: hands `python -m bench COMMAND ...` to the file of that command."""

import argparse
import importlib
import os
import sys

COMMANDS = {
    "digits": "train a digit classifier under both filter_jits; are they identical, and how fast?",
    "calls": "the cost of a warm call, against every competitor, over many workloads",
    "shapes": "one function called with several shapes: later ones, older ones after a trace",
    "statics": "configurations, structures in turn, deep and large trees, against Equinox",
    "training": "a step of training, packed and not, against every way to write it",
    "latency": "p50 to p99.9 of small fixed models, against ONNX Runtime, PyTorch and JAX itself",
    "serving": "p50 to p99.9 of warm calls while another thread traces and compiles new shapes",
    "downstream": "packages built on Equinox, and its own examples: the same outcomes under both?",
    "startup": "importing, first calls, new shapes, nested calls while tracing, faster starts",
    "compare": "one of these with another checkout's eqxjit and with this one's, in turn",
    "figures": "write the figures on record into README, pages and pictures; --check, --stale",
    "all": "make all records again, one after the other, then `figures`",
}


def main() -> int:
    """Run the chosen command; its exit status is that of the process."""
    listing = "\n".join(f"  {name:10} {purpose}" for name, purpose in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        epilog=f"commands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="command")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args()
    # On a GPU, so that the processes of a command have memory beside it.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Imported only now: the commands need different packages and different JAX settings.
    return importlib.import_module(f"bench.commands.{chosen.command}").main(chosen.arguments)


if __name__ == "__main__":
    sys.exit(main())
