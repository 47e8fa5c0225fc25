"""Run an unmodified Megatron-LM script with the plugin: ``-m megatron_lrmoe.run PATH/SCRIPT ARGS``."""

import runpy
import sys
from pathlib import Path

from megatron_lrmoe.device import activate_if_needed, with_cpu_flags

USAGE = "usage: torchrun ... -m megatron_lrmoe.run PATH/pretrain_gpt.py [Megatron's flags]"


def main(argv: list[str]) -> int:
    """Run the script ``argv[0]`` as ``__main__`` with the arguments after it.

    Returns:
        2 when there is no such script (a message is on stderr), otherwise 0.
    """
    if not argv or not Path(argv[0]).is_file():
        found = repr(argv[0]) if argv else "nothing"
        print(f"script: found {found}, allowed is the path of an existing file\n{USAGE}", file=sys.stderr)
        return 2
    script, args = argv[0], argv[1:]
    # First, so that the checkout's own megatron wins over an installed one.
    sys.path.insert(0, str(Path(script).resolve().parent))
    if activate_if_needed():
        args = with_cpu_flags(args)
    sys.argv = [script, *args]
    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.mcore.probe import install_if_asked

    install_if_asked()
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
