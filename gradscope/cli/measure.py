"""`gradscope measure`: makes a folder with a token table, figures and a summary."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from gradscope.cli.flags import check_no_plan
from gradscope.cli.measuring import Measuring
from gradscope.diagnosis import SUMMARY, THEORY, add_summary
from gradscope.errors import InputError
from gradscope.gradients import TABLE, read_table


@dataclass(frozen=True)
class Measure(Measuring):
    """Measure every response token's own gradient, into a folder with a token table, figures and a summary."""

    def run(self) -> None:
        if self.plan:
            print(self.make_plan())
            return
        check_no_plan(self.flops)
        if self.theory and not self.figures:
            raise InputError("--theory needs figures; leave out --no-figures, or --theory")
        measured = self.measure()
        if self.figures:
            known, table = (measured.folder, measured.policy, measured.batch), read_table(measured.folder)
            asked = {"resources": measured.resources, "gradient_memory": self.gradient_memory}
            add_summary(*known, table, measured.settings, **asked, minutes=measured.minutes_left)
        if self.figures and measured.resources.processes.is_main:
            texts = [SUMMARY, *([THEORY] if self.theory and (self.out / THEORY).is_file() else [])]
            print(*((self.out / name).read_text(encoding="utf-8") for name in texts), sep="\n")
            print(f"{self.out / TABLE}, figures in {self.out / 'figures'}")
            asked = {"temperature": self.settings.temperature, **self.reading, "base": self.base}
            asked = {name.replace("_", "-"): value for name, value in asked.items() if value is not None}
            words = {name: json.dumps(v) if isinstance(v, dict) else str(v) for name, v in asked.items()}
            flags = "".join(f" --{name} {shlex.quote(word)}" for name, word in words.items())
            print(f"next: gradscope diagnose {self.model} --rollouts {self.rollouts}{flags} --out DIR")
