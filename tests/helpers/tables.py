"""Tables on the disk."""

import json

import pyarrow as pa


def write_dataset(folder, table, features=None):
    """A folder as Hugging Face's `save_to_disk` writes it."""
    folder.mkdir(parents=True)
    name = "data-00000-of-00001.arrow"
    with pa.OSFile(str(folder / name), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name}], "_split": None}))
    (folder / "dataset_info.json").write_text(json.dumps({"features": features or {}}))
    return folder
