"""Published measurements as shapes, machines, plans and engines; what cannot be read is listed with the reason."""

import csv
import re
from dataclasses import replace
from pathlib import Path

from weft.errors import UsageError, WeftError
from weft.planner.cost import AWAY, CONTEXT, Plan, schedule_number, schedules
from weft.planner.engine_constants import ENGINES
from weft.planner.fit import Measurement
from weft.planner.machine import Machine, find_device, machine_of
from weft.planner.planned_model import SHAPES
from weft.recipe import PLACES
from weft.schedule.build import builders
from weft.shapes.shape import Shape, shape_of_sizes

NEEDED = (
    "id",
    "source",
    "model",
    "layers",
    "hidden",
    "heads",
    "seq_len",
    "hardware",
    "n_gpus",
    "global_batch",
)
#: Schedules that published rows name, newest first; others ran 1F1B.
_SCHEDULES = ("zb-2p", "zb-1p", "zb-v", "zb-h1", "zb-h2")
#: Models with layers that the cost model does not know: state spaces, gated delta rules, sparse attention.
_UNKNOWN = re.compile(
    r"nemotron[-_ ]?(3|h|nano)|mamba|jamba|zamba|falcon[-_ ]?h|qwen[-_ ]?3([-_ ]?next|\.5)|kimi[-_ ]?linear|"
    r"deepseek[-_ ]?v(4|3\.2)"
)
_BLANK = ("", "-", "--", "—", "n/a", "na", "nan", "null", "?", "unknown")
#: GiB beyond the formulas, per program: medians over published peaks. Megatron-DeepSpeed's is what nvidia-smi shows
#: (context, communication buffers and what the allocator keeps), the others' what the allocator has handed out.
CONSTANTS: dict[str, float] = {
    "megatron-deepspeed": 12.0,
    "megatron-lm": 0.0,
    "nanotron": 0.0,
    "torchtitan": 7.5,
}
#: Speed of FlashAttention's Triton kernel beside FlashAttention-2 on A100 (Dao 2023, 2307.08691, figure 4: 83 to 110
#: beside 171 to 203 TFLOP/s).
TRITON = 0.52
#: GiB per unit of memory; a blank is GiB.
_UNITS = {
    "": 1.0,
    "GIB": 1.0,
    "GB": 1e9 / 2**30,
    "MIB": 1 / 1024,
    "MB": 1e6 / 2**30,
    "TIB": 1024.0,
    "TB": 1e12 / 2**30,
}


def read_rows(path: Path) -> tuple[list[Measurement], list[tuple[str, str]]]:
    """``(rows, refused)``: what the file holds, and ``(id, reason)`` of every line that does not make a row."""
    if not path.is_file():
        raise WeftError(
            f"rows {path} does not exist; give a CSV file with the header of measured.csv"
        )
    rows, refused = [], []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(
                    f"{path}: column {missing[0]!r} is missing; the header of measured.csv is expected"
                )
            for number, record in enumerate(reader, 2):
                clean = {
                    key: (value or "").strip()
                    for key, value in record.items()
                    if isinstance(value, str | None)
                }
                try:
                    rows.append(parse(clean))
                except (ValueError, UsageError) as error:
                    refused.append((clean.get("id") or f"line {number}", str(error)))
    except (UnicodeDecodeError, csv.Error, OSError) as error:
        raise UsageError(f"{path} is not a readable CSV file: {error}") from None
    return rows, refused


def find_shape(text: str) -> Shape | None:
    """The built-in that a free text names, e.g. ``LLAMA3_70B`` or ``Qwen3_30B_a3B``; none if there is none."""
    plain = "".join(
        c for c in re.sub(r"llama[-_ ]?3\.[13]", "llama3", text.lower()) if c.isalnum()
    )
    names = {"".join(c for c in name if c.isalnum()): name for name in SHAPES}
    names["qwen330ba3b"] = "qwen3-30b"
    best = max((n for n in names if n in plain), key=len, default=None)
    return SHAPES[names[best]] if best else None


def family_of(framework: str, sharding: str, device_peak: float, attention: str) -> str:
    """Class of a program from what it is called and does."""
    name = framework.lower()
    if name.startswith("weft"):
        return "weft"
    if re.search("maxtext|jax|xla|levanter|paxml|easylm|t5x", name):
        return "xla"
    if re.search("torchtitan|compile|fms|nanogpt|nanochat|torchtune|lingua", name):
        return "compiled"
    if re.search("foundry|composer|lightning|lit-?gpt|olmo", name) or (
        "fsdp" in name and "megatron" not in name
    ):
        return "fsdp"
    # submissions to MLPerf with Transformer Engine are NeMo's, by whomever
    if re.search("megatron|nemo|intern|mlperf|neox", name):
        old = "deepspeed" in name or (
            device_peak < 900e12 and not re.search("nemo|bridge|intern|mlperf", name)
        )
        return "megatron-2021" if old and "flash" not in attention else "megatron"
    if "fsdp" in sharding.lower():
        return "fsdp"
    return "eager" if "nanotron" in name else "torch"


def program(framework: str) -> str:
    """The name of a framework without versions and variants: one memory constant for each."""
    return re.split(r"[ +/]", framework.strip() or "unknown")[0].lower()


def release_of(framework: str, reference: str) -> tuple[int, ...]:
    """The version in a program's name, else year and month in the name of where the row was published."""
    if found := re.search(r"(?<![\d.])(\d+(?:\.\d+)+)", framework):
        return tuple(int(part) for part in found[1].split("."))
    if found := re.search(r"[-_/ ](20[12]\d)-?(0[1-9]|1[0-2])(?=[-_./ ]|$)", reference):
        return int(found[1]), int(found[2])
    return ()


def parse(r: dict[str, str]) -> Measurement:
    """One line. Raises ValueError with the reason it cannot be read."""
    r = {name: "" if text.lower() in _BLANK else text for name, text in r.items()}
    assumed: list[str] = []

    def number(name: str, default: float | None = None) -> float:
        text = r.get(name, "")
        if not text:
            if default is None:
                raise ValueError(f"{name} is not stated")
            return default
        try:
            value = float(re.sub(r"(?<=\d),(?=\d{3}\b)", "", text))  # 1,024 is a number
        except ValueError:
            raise ValueError(f"{name} = {text!r} is not a number") from None
        if not 0 <= value < 1e15:
            raise ValueError(f"{name} = {text!r} is not possible")
        return value

    if "formula" in r.get("mem_kind", "") or "ANALYTIC" in r.get("source", ""):
        raise ValueError("values of a formula, not a measurement")
    shape = _shape(r, number, assumed)
    world = number("n_gpus")
    device = find_device(r["hardware"], number("gpu_mem_gb", 80))
    seq = number("seq_len")
    batch = number("global_batch")
    cp = number("cp", 1)
    if not r.get("tp") and not r.get("pp") and not r.get("dp"):
        raise ValueError("tp, pp and dp are not stated")
    if r.get("tp"):
        tp, pp = number("tp"), number("pp", 1)
    else:
        ways = world / number("dp") / cp
        tp = min(8.0, ways)
        pp = ways / tp
        assumed.append(f"tp={tp:.0f},pp={pp:.0f}")
    wrong = [n for n in ("n_gpus", "global_batch", "tp", "pp", "cp", "seq_len", "micro_batch", "vpp", "ep",
                         "gpus_per_node") if number(n, 1) < 1]  # fmt: skip
    if wrong or min(tp, pp) < 1:
        raise ValueError(f"{(wrong or ['dp'])[0]} leaves a size of zero")
    # what is stated as dp may contradict the number of devices
    data = world / (tp * pp * cp)
    if data < 1 or data != int(data):
        raise ValueError(
            f"tp x pp x cp = {tp * pp * cp:.0f} does not divide {world:.0f} devices"
        )
    if not r.get("micro_batch"):
        steps = number("grad_accum", 0)
        if not steps and pp > 1 and "torchtitan" in r.get("framework", ""):
            # Its default until 2025: as many microbatches as there are stages.
            steps = pp * number(
                "vpp", 2 if "interleaved" in r.get("notes", "").lower() else 1
            )
        micro = max(1.0, batch / data / steps) if steps else 1.0
        assumed.append(f"micro_batch={micro:.0f}")
    else:
        micro = min(number("micro_batch"), batch / data)
    framework, notes = r.get("framework", ""), r.get("notes", "")
    sharding = r.get("dp_sharding", "")
    family = family_of(f"{framework} {'MaxText' if 'MaxText' in notes else ''}", sharding, device.bf16 * 1e12,
                       r.get("attention", ""))  # fmt: skip
    bits = _bits(r.get("precision", ""), family, device.fp8 > device.bf16, assumed)
    zero = 3 if "FSDP" in sharding.upper() and "0" not in sharding else 1
    if sharding in ("none", "ZeRO-0") or (not sharding and family == "megatron-2021"):
        zero = 0
    recompute = r.get("recompute", "").lower()
    if not recompute:
        assumed.append("recompute=none")
    schedule = next(
        (name for name in _SCHEDULES if name in f"{framework} {notes}".lower()), "1f1b"
    )
    # as weft.observe.measured writes it
    said = dict(re.findall(r"(\w+)=([\w-]+)", notes)) if family == "weft" else {}
    schedule = said["schedule"] if said.get("schedule") in schedules() else schedule
    part = re.search(r"shard=(\d+)", sharding)  # copies of sharded groups
    shard = min(float(part[1]), data) if part else data if zero == 3 else 1.0
    virtual = number("vpp", 1)
    if schedule != "1f1b" and not builders()[schedule].free:
        virtual = 1
    elif (
        pp > 1 and not r.get("vpp") and "interleaved" in f"{framework} {notes}".lower()
    ):
        virtual = 2
        assumed.append("virtual=2")
    plan = Plan(
        dp=data / shard,
        shard=shard,
        zero=zero,
        tp=tp,
        cp=cp,
        pp=pp,
        virtual=virtual,
        schedule=schedule_number(schedule),
        ep=min(number("ep", 1), data * cp * tp),
        micro_batch=micro,
        batch=batch,
        seq=seq,
        recompute=2 if "full" in recompute else 1 if "selective" in recompute else 0,
        bits=bits,
        context=CONTEXT.index(said["context"]) if said.get("context") in CONTEXT else 0,
        **{kind: PLACES.index(said.get(kind, "device")) for kind in AWAY},
    )
    adapted = re.search(
        r"\bq?lora\b", f"{r['model']} {notes}".lower().replace("_", " ")
    )
    shape = replace(shape, frozen=int(bool(adapted)))
    per_node = int(number("gpus_per_node", 8))
    domain = (
        device.domain if per_node < device.domain and device.domain > 8 else per_node
    )
    release = release_of(framework, r.get("source_ref", ""))
    constant = CONSTANTS.get(program(framework), ENGINES[family].constant)
    engine = replace(ENGINES[family], constant=constant)
    # build_model places blocks by their compute cost
    if program(framework) == "nanotron":
        engine = replace(engine, level=1.0)
    if (
        program(framework) == "torchtitan"
        and "compile" in framework.lower()
        and release >= (2025, 4)
    ):
        # The loss is compiled as well (its pull request 1033): logits and their gradient stay in 16 bits.
        engine = replace(engine, vocab=4.0)
    if "drop" in r["model"].lower() or (
        program(framework) == "megatron-bridge" and domain > 8
    ):
        # Dropped and padded tokens need no counts of tokens per expert on the host; and where the fast domain is a
        # rack, the recipes of Megatron-Bridge capture the routing in CUDA graphs.
        engine = replace(engine, dispatch=1.0)
    first = re.search(
        r"triton|flash[- ]?att\w*[- ]?v?1\b", r.get("attention", "").lower()
    )
    if program(framework) == "llm-foundry" or first:
        # The recipes of llm-foundry ask for the Triton kernel, for ALiBi.
        engine = replace(engine, attention=TRITON)
    if "flash" in r.get("attention", "").lower():
        engine = replace(engine, flash=1.0)
    elif "unfused" in r.get("attention", "").lower():
        engine = replace(engine, flash=0.0)
    if family == "megatron-2021" and r.get("precision", "").lower() == "bf16":
        # BF16_Optimizer of DeepSpeed sums gradients in float32 beside the bfloat16 ones.
        engine = replace(
            engine, gradient=6.0 if "deepspeed" in framework.lower() else 4.0
        )
    if "+SP" in r.get("recompute", ""):
        engine = replace(engine, sequence=1.0)
    network = number("internode_gbps_per_gpu", 0) / 8 or None
    # Jean Zay joins the eight A100 of a node by four NVLinks each (BLOOM, 2211.05100, section 3.4), not by twelve.
    few_links = "bigscience" in r["source"].lower() and device.name == "A100-80GB"
    machine = machine_of(
        device,
        bits,
        memory=number("gpu_mem_gb", 0) or None,
        network=network,
        link=device.link / 3 if few_links else None,
        domain=domain,
    )
    unit = r.get("peak_mem_unit", "")
    if unit.upper() not in _UNITS:
        raise ValueError(
            f"peak_mem_unit = {unit!r} is not known; GiB, GB, MiB, MB, TiB or TB"
        )
    gib = number("peak_mem", 0) * _UNITS[unit.upper()] or None
    ran = not re.search(r"oom|out[- ]of[- ]memory", r.get("status", ""), re.I)
    seconds = _seconds(r, number, shape, plan, machine, world) if ran else None
    if ran and seconds is None and gib is None:
        raise ValueError("neither a time nor a memory is stated")
    return Measurement(
        id=r["id"],
        source=r["source"],
        family=family,
        framework=program(framework),
        device=device.name,
        bits=bits,
        shape=shape,
        machine=machine,
        plan=plan,
        engine=engine,
        seconds=seconds,
        gib=gib,
        ran=ran,
        assumed=tuple(assumed),
        release=release,
    )


def _depth(r: dict[str, str], number) -> float:  # type: ignore[no-untyped-def]
    """Layers of a GPT of stated size and width (12 hidden^2 weights each), as many as its pipeline divides. Nothing is
    made of a size alone: the same size is up to 1.4 times slower at a width that its kernels do not like."""
    label = re.search(r"(\d+(?:\.\d+)?)\s*B\b", r["model"], re.I)
    size = number("params_b", float(label[1]) if label else 0.0) * 1e9
    embed, stages, vocab = (
        number("hidden", 0),
        max(1.0, number("pp", 1)),
        number("vocab", 51200),
    )
    if "gpt" not in r["model"].lower() or not size or embed < 1:
        raise ValueError(f"the shape of {r['model']!r} is neither stated nor built in")
    layers = max(1, round((size - vocab * embed) / (12 * embed**2) / stages)) * stages
    if abs(12 * layers * embed**2 + vocab * embed - size) > 0.03 * size:
        raise ValueError(
            f"no depth of {r['model']!r} with hidden {embed:g} and {stages:g} stages is of its size"
        )
    return layers


def _shape(r: dict[str, str], number, assumed: list[str]) -> Shape:  # type: ignore[no-untyped-def]
    if _UNKNOWN.search(r["model"].lower()):
        raise ValueError(
            f"{r['model']!r} has layers that are not modelled (state spaces, sparse attention)"
        )
    # the columns say nothing about experts
    experts = "moe" in r.get("arch", "").lower()
    if experts or not r.get("layers") or not r.get("hidden"):
        known = find_shape(r["model"])
        if known is not None:
            return known
        if experts:
            raise ValueError(f"the experts of {r['model']!r} are not built in")
        r["layers"] = f"{_depth(r, number):g}"
        assumed.append(f"layers={r['layers']}")
    embed = number("hidden")
    heads = number("heads", max(1, round(embed / 128)))
    if min(embed, heads, number("layers")) < 1:
        raise ValueError("layers, hidden or heads is zero")
    gated = number("gated_mlp", 0)
    shape = shape_of_sizes(
        number("layers"),
        embed=embed,
        heads=heads,
        kv_heads=number("kv_heads", heads),
        head_dim=embed / heads,
        ffn=number("ffn", round(8 * embed / 3) if gated else 4 * embed),
        vocab=number("vocab", 51200),
        gated=gated,
        tied=number("tied_embeddings", 1 - gated),
    )
    # what the layers leave of the stated size, within the usual
    if not r.get("vocab") and r.get("params_b"):
        left = number("params_b") * 1e9 - (
            shape.parameters - (2 - shape.tied) * shape.table
        )
        shape = replace(
            shape, vocab=min(max(left / ((2 - shape.tied) * embed), 32000.0), 256000.0)
        )
    return shape


def _bits(text: str, family: str, low: bool, assumed: list[str]) -> int:
    """Bits of the products; where a vendor's tables leave them out, their headline precision is 8 bits."""
    text = text.lower()
    if not text:
        bits = 8 if low and family == "megatron" else 16
        assumed.append(f"{bits} bits")
        return bits
    if "fp4" in text:
        return 4
    if "fp8" in text:
        return 8
    return 32 if text in ("fp32", "float32", "tf32") else 16


def _seconds(
    r, number, shape: Shape, plan: Plan, machine: Machine, world: float
) -> float | None:  # type: ignore[no-untyped-def]
    """Seconds per step from whichever column says it; flops count attention whole, as all these tables do."""
    tokens = plan.batch * plan.seq
    if value := number("iter_time_s", 0):
        return value
    for name, per in (("tokens_per_s_total", 1.0), ("tokens_per_s_per_gpu", world)):
        if value := number(name, 0):
            return tokens / (value * per)
    for name, per in (("samples_per_s", 1.0), ("samples_per_s_per_gpu", world)):
        if value := number(name, 0):
            return plan.batch / (value * per)
    flops = shape.flops_per_token(plan.seq, causal=1.0)
    hardware = flops + (flops / 3 - 2 * shape.table) * (plan.recompute == 2)
    if value := number("tflops_per_gpu", 0):
        used = (
            hardware if re.search("hardware|incl", r.get("tflops_kind", "")) else flops
        )
        return tokens * used / (value * 1e12 * world)
    base = machine.peak16 * world / 100
    if value := number("mfu_pct", 0):
        return tokens * flops / (value * base)
    if value := number("hfu_pct", 0):
        return tokens * hardware / (value * base)
    return None
