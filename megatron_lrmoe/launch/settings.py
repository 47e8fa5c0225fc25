"""What a launch script's variables say: read from the environment, checked all at once."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

POLICIES = ("stock", "lrm", "lrm+replicas")


@dataclass(frozen=True)
class Settings:
    """Variables of a launch; an empty one is not given, and the recipe's value counts.

    Args:
        MEGATRON_PATH: checkout of Megatron-LM; without it the megatron-core wheel is used.
        DATA_PATH: prefixes of indexed datasets, with weights or without; without it mock data.
        TOKENIZER: folder of a Hugging Face tokenizer; without it token numbers are taken as they are.
        GPUS, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT: of torchrun.
        TP, PP, EP: parallel sizes.
        SEQ, MICRO_BATCH, GLOBAL_BATCH, ITERATIONS: of training.
        RETENTION, POLICY: of the plugin; POLICY is stock, lrm or lrm+replicas.
        SAVE: folder of checkpoints, which a restart goes on from. SAVE_INTERVAL: in iterations.
        TENSORBOARD: folder. WANDB_PROJECT: name.
    """

    MEGATRON_PATH: str = ""
    DATA_PATH: str = ""
    TOKENIZER: str = ""
    GPUS: str = "8"
    NNODES: str = "1"
    NODE_RANK: str = "0"
    MASTER_ADDR: str = "localhost"
    MASTER_PORT: str = "6000"
    TP: str = ""
    PP: str = ""
    EP: str = ""
    SEQ: str = ""
    MICRO_BATCH: str = ""
    GLOBAL_BATCH: str = ""
    ITERATIONS: str = ""
    RETENTION: str = "0.8"
    POLICY: str = "lrm"
    SAVE: str = ""
    SAVE_INTERVAL: str = "500"
    TENSORBOARD: str = ""
    WANDB_PROJECT: str = ""

    def __post_init__(self) -> None:
        problems = self.problems()
        if problems:
            raise ValueError("\n".join(["these variables cannot be used:", *problems]))

    def problems(self) -> list[str]:
        """A sentence for each variable that cannot be used."""
        counts = ("GPUS", "NNODES", "TP", "PP", "EP", "SEQ", "MICRO_BATCH", "GLOBAL_BATCH", "ITERATIONS")
        found = [
            f"{name}: found {value!r}, allowed is a whole number from {least}"
            for name, least in [*((name, 1) for name in (*counts, "SAVE_INTERVAL", "MASTER_PORT")), ("NODE_RANK", 0)]
            if (value := getattr(self, name)) and not (re.fullmatch(r"\d+", value) and int(value) >= least)
        ]
        if not re.fullmatch(r"\d*\.?\d+|1\.", self.RETENTION) or not 0 < Fraction(self.RETENTION) <= 1:
            found.append(f"RETENTION: found {self.RETENTION!r}, allowed is a number above 0, and at most 1")
        if self.POLICY not in POLICIES:
            found.append(f"POLICY: found {self.POLICY!r}, allowed are {', '.join(POLICIES)}")
        if self.MEGATRON_PATH and not (Path(self.MEGATRON_PATH) / "pretrain_gpt.py").is_file():
            found.append(f"MEGATRON_PATH: found {self.MEGATRON_PATH!r}, allowed is a checkout with a pretrain_gpt.py")
        if self.TOKENIZER and not Path(self.TOKENIZER).is_dir():
            found.append(f"TOKENIZER: found {self.TOKENIZER!r}, allowed is a folder: nothing is downloaded")
        for prefix in self.DATA_PATH.split():
            if not re.fullmatch(r"[0-9.]+", prefix) and not Path(f"{prefix}.idx").is_file():
                found.append(f"DATA_PATH: found {prefix!r}, allowed are prefixes of a .bin and .idx, and weights")
        return found

    @classmethod
    def read(cls, environment: Mapping[str, str] = os.environ) -> "Settings":
        """From the variables of the same names; others are left alone.

        Raises:
            ValueError: listing every variable that cannot be used, with what was found and what is allowed.
        """
        names = cls.__dataclass_fields__
        return cls(**{name: value for name, value in environment.items() if name in names and value})

    @property
    def ranks(self) -> int:
        """Processes of the job."""
        return int(self.GPUS) * int(self.NNODES)
