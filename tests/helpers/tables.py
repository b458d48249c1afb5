"""Tables on the disk."""

import datasets
import pyarrow as pa

datasets.disable_progress_bars()  # of saving; reading draws none


def write_dataset(folder, table, shards=1, **kinds):
    """A folder as Hugging Face's `save_to_disk` writes it, with columns of special kinds; several tables are splits."""
    if isinstance(table, pa.Table):
        made = as_dataset(table, kinds)
        made.save_to_disk(folder, num_shards=shards)
    else:
        made = datasets.DatasetDict({name: as_dataset(part, kinds) for name, part in table.items()})
        made.save_to_disk(folder)
    return folder


def as_dataset(table, kinds):
    made = datasets.Dataset(table)
    return made.cast(datasets.Features({**made.features, **kinds}))
