"""Quantises a GGUF file's matrices by gguf-py, as llama.cpp's llama-quantize does with all but vectors and routers."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

_BLOCK = 32  # inputs of a block; a matrix of other widths stays as it is


def requantised(source: Path, target: Path, kind: str) -> Path:
    """A copy of the file whose float16 matrices are of this type."""
    reader, wanted = gguf.GGUFReader(source), gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            of_type, *of_items = field.types
            writer.add_key_value(name, field.contents(), of_type, of_items[-1] if of_items else None)
    for tensor in reader.tensors:
        is_matrix = tensor.tensor_type == gguf.GGMLQuantizationType.F16 and tensor.shape[0] % _BLOCK == 0
        of_tensor = wanted if is_matrix else tensor.tensor_type
        data = gguf.quants.quantize(tensor.data.astype(np.float32), wanted) if is_matrix else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=of_tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
