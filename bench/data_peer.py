"""The funnel of ``bench/data.py`` by datatrove, in a venv of its own; ``data.py`` starts it.

VENV/bin/python -P bench/data_peer.py DATA OUT TOKENIZER.json WORKERS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

BUCKETS = 14


def main() -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.writers import JsonlWriter, ParquetWriter

    data, out, tokenizer, workers = sys.argv[1:]
    tasks = 8
    config = MinhashConfig(n_grams=5, num_buckets=BUCKETS, hashes_per_bucket=8)
    filtered = f"{out}/filtered"
    stages = [
        (tasks, [
            JsonlReader(data), GopherRepetitionFilter(), GopherQualityFilter(), C4QualityFilter(),
            FineWebQualityFilter(), JsonlWriter(filtered, compression=None),
        ]),
        (tasks, [JsonlReader(filtered), MinhashDedupSignature(f"{out}/signatures", config)]),
        (BUCKETS, [MinhashDedupBuckets(f"{out}/signatures", f"{out}/buckets", config=config)]),
        (1, [MinhashDedupCluster(f"{out}/buckets", f"{out}/removed", config)]),
        (tasks, [
            JsonlReader(filtered), MinhashDedupFilter(f"{out}/removed"), ParquetWriter(f"{out}/documents"),
            DocumentTokenizer(f"{out}/tokens", tokenizer_name_or_path=tokenizer, shuffle_documents=False),
        ]),
    ]  # fmt: skip
    for number, (count, steps) in enumerate(stages):
        LocalPipelineExecutor(
            steps,
            tasks=count,
            workers=int(workers),
            logging_dir=f"{out}/logs/{number}",
            start_method="fork",  # so that the time of its processes is counted, too
        ).run()
    import pyarrow.parquet

    files = Path(out, "documents").glob("*.parquet")
    left = sum(pyarrow.parquet.read_metadata(file).num_rows for file in files)
    Path(out, "left.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
