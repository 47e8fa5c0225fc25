"""Train a GPT with the plugin from the megatron-core wheel alone: ``-m megatron_lrmoe.pretrain_gpt ARGS``.

Takes the flags of Megatron-LM's ``pretrain_gpt.py``, and gives the same losses, without a checkout. Not carried,
and refused by name: ModelOpt, fill-in-the-middle data, fine-tuning and distillation from stored logits.
"""

import sys
from collections.abc import Iterable

from megatron_lrmoe.device import activate_if_needed, with_cpu_flags

NOT_CARRIED = {
    "--modelopt-enabled": "ModelOpt",
    "--export-": "ModelOpt",
    "--finetune-": "ModelOpt",
    "--qad-": "ModelOpt",
    "--freeze-base-for-mtp": "ModelOpt",
    "--enable-gpt-oss": "ModelOpt",
    "--fim-": "fill-in-the-middle data",
    "--sft": "supervised fine-tuning",
    "--logits-load-": "distillation from stored logits",
}


def main() -> None:
    """Train with the flags on the command line.

    Raises:
        ValueError: flags of features that this entry point does not carry.
    """
    refuse_not_carried(sys.argv[1:])
    if activate_if_needed():
        sys.argv[1:] = with_cpu_flags(sys.argv[1:])
    import megatron_lrmoe.megatron_adaptor  # noqa: F401
    from megatron_lrmoe.mcore.gpt_training import train
    from megatron_lrmoe.mcore.probe import install_if_asked

    install_if_asked()
    train()


def refuse_not_carried(args: Iterable[str]) -> None:
    """Raise one ValueError that names every flag among the arguments that needs Megatron's own script."""
    found = [
        f"{flag}: found, but {feature} is not carried by megatron_lrmoe.pretrain_gpt; allowed with Megatron-LM's "
        "own pretrain_gpt.py under megatron_lrmoe.run"
        for flag in (arg.partition("=")[0] for arg in args)
        for name, feature in NOT_CARRIED.items()
        if flag == name or (name.endswith("-") and flag.startswith(name))
    ]
    if found:
        raise ValueError("\n".join(found))


if __name__ == "__main__":
    main()
