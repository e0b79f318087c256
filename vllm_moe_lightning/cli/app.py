"""The command `vllm-moe-lightning`. Each subcommand imports what it needs when it runs, so that help is instant."""

from __future__ import annotations

import typer

from vllm_moe_lightning.cli.check import check
from vllm_moe_lightning.cli.doctor import doctor
from vllm_moe_lightning.cli.plan import explain, plan
from vllm_moe_lightning.cli.profile import profile
from vllm_moe_lightning.cli.run import run
from vllm_moe_lightning.cli.trace import trace

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Run mixture-of-experts models that are larger than the device, inside vLLM.",
)
app.command()(plan)
app.command()(explain)
app.command()(profile)
app.command()(doctor)
app.command()(run)
app.command()(trace)
app.command()(check)


def main() -> None:
    app()
