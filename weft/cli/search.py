"""``weft search``: improve a policy against the simulator."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.cli.arguments import AsJson, PluginModules, import_plugins, read_keys
from weft.cli.console import print_table, warn
from weft.errors import UsageError, nearest

if TYPE_CHECKING:
    from weft.search.evolution import SearchGeneration

_policy = (
    "What to improve. cluster-dispatch: which engine a request goes to; prompt-order: in "
    "which order an engine reads prompts."
)
PolicyName = Annotated[str, typer.Argument(metavar="POLICY", help=_policy)]
_out = "Write the find as a plugin to this file, whose name is also the policy's."
Out = Annotated[Path | None, typer.Option("--out", metavar="FILE.py", help=_out)]
_server = "Let a model behind this OpenAI-compatible address propose policies too."
Server = Annotated[
    str, typer.Option("--server", metavar="http://HOST:PORT", help=_server)
]
#: Not the key itself, which every user of the machine would see in its list of processes.
_key = "With --server: a file with its API key; else the variable OPENAI_API_KEY."
#: Proposals of a model in each generation.
PROPOSALS = 4
_proposals = "With --server: proposals in each generation."


def search_command(
    policy: PolicyName,
    generations: Annotated[
        int, typer.Option(min=1, help="Generations of the search.")
    ] = 12,
    population: Annotated[
        int, typer.Option(min=4, help="Policies of a generation.")
    ] = 24,
    workloads: Annotated[
        int, typer.Option(min=1, help="Workloads, and as many that are held out.")
    ] = 3,
    requests: Annotated[
        int, typer.Option(min=10, help="Requests of a workload.")
    ] = 120,
    seed: Annotated[int, typer.Option(help="Seed of all random choices.")] = 0,
    server: Server = "",
    model: Annotated[
        str, typer.Option(help="With --server: the model; by default its first.")
    ] = "",
    api_key: Annotated[
        Path | None, typer.Option("--api-key", metavar="FILE", help=_key)
    ] = None,
    proposals: Annotated[int, typer.Option(min=1, help=_proposals)] = PROPOSALS,
    out: Out = None,
    plugin: PluginModules = None,
    as_json: AsJson = False,
) -> int:
    """Search for a better policy of serving, with the simulator as judge, and check it on other workloads."""
    from weft.registry import find, names
    from weft.search.policy_search import (
        SearchSize,
        check_plugin_path,
        expression_diff,
        find_json,
        plugin_text,
        search_policy,
        technique_name,
        write_plugin,
    )

    import_plugins(plugin)
    if policy not in names("search"):
        raise UsageError(
            f"weft search {policy} is not possible; {nearest(policy, names('search'))}"
        )
    judged = find("search", policy).implementation()
    if out is not None:
        check_plugin_path(out, judged.registered)
    propose = None
    if not server and (model or api_key or proposals != PROPOSALS):
        raise UsageError(
            "--model, --api-key and --proposals are about --server; give its address"
        )
    if server:
        from weft.search.model_proposals import ModelProposals
        from weft.serve.api_client import ApiClient
        from weft.serve.talk import key_of_environment

        key = read_keys(api_key)[0] if api_key else key_of_environment()
        client = ApiClient(server, key)
        name = model or client.first_model()
        propose = ModelProposals(judged, client, name, proposals, warn)
    size = SearchSize(generations, population, workloads, requests, seed)

    def say(generation: "SearchGeneration") -> None:
        if not as_json:
            print(
                f"generation {generation.number + 1}/{generations}  {generation.judged:,} policies  best "
                f"{generation.best.cost:.4g} {judged.unit}  {generation.best.expression}",
                flush=True,
            )

    best = search_policy(judged, size, say, propose or (lambda best: ()))
    gain = best.gain(judged.greedy)
    if out is not None and gain > 0:
        write_plugin(out, plugin_text(judged, policy, technique_name(out), best))
    elif out is not None:
        warn(f"{out} is not written, as nothing better was found")
    if as_json:
        print(find_json(policy, size, best))
        return 0
    rows = [
        [name, f"{best.seen[name]:.4g}", f"{best.held_out[name]:.4g}"]
        for name in sorted(best.held_out, key=lambda name: best.held_out[name])
    ]
    print_table(["policy", judged.unit, "held out"], rows)
    print(expression_diff(judged, best))
    if gain <= 0:
        print(
            f"nothing better than {judged.greedy} on held-out workloads; search longer, or use that"
        )
        return 0
    print(f"{gain:.1%} less than {judged.greedy} on held-out workloads")
    if out is not None:
        usage = judged.usage.format(module=out.stem, name=technique_name(out))
        print(f"use it in the folder of {out.name}: {usage}")
    return 0
