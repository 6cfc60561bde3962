"""The compiled kernels through ctypes: structs and signatures of ``csrc/lampejo_kernels.h``, nothing else."""

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

Q4, Q4K, Q8 = 0, 1, 2  # kinds of packed matrices


class CMatrix(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("kind", c_int32),
        ("num_out", c_int32),
        ("num_in", c_int32),
        ("bias", c_void_p),
    ]


class CSegment(ctypes.Structure):
    _fields_ = [("start", c_int32), ("length", c_int32), ("position", c_int32), ("first_page", c_int32)]


class CBatch(ctypes.Structure):
    _fields_ = [
        ("num_tokens", c_int32),
        ("num_segments", c_int32),
        ("page_size", c_int32),
        ("rotary_dim", c_int32),
        ("segments", POINTER(CSegment)),
        ("pages", POINTER(c_int32)),
        ("slots", c_void_p),
        ("cos", c_void_p),
        ("sin", c_void_p),
    ]


class CAttentionHalf(ctypes.Structure):
    _fields_ = [
        ("norm", c_void_p),
        ("eps", c_float),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("q", CMatrix),
        ("k", CMatrix),
        ("v", CMatrix),
        ("out", CMatrix),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qk_eps", c_float),
        ("block", c_int32),
        ("causal", c_int32),
        ("window", c_int32),
        ("gated", c_int32),
    ]


class CMlpHalf(ctypes.Structure):
    _fields_ = [
        ("norm", c_void_p),
        ("eps", c_float),
        ("reserved", c_int32),
        ("gate", CMatrix),
        ("up", CMatrix),
        ("down", CMatrix),
    ]


class CExpertsHalf(ctypes.Structure):
    _fields_ = [
        ("norm", c_void_p),
        ("eps", c_float),
        ("num_experts", c_int32),
        ("num_active", c_int32),
        ("normalised", c_int32),
        ("router", c_void_p),
        ("gate", CMatrix),
        ("up", CMatrix),
        ("down", CMatrix),
        ("shared_router", c_void_p),
        ("shared_gate", CMatrix),
        ("shared_up", CMatrix),
        ("shared_down", CMatrix),
    ]


class CDeltaSizes(ctypes.Structure):
    _fields_ = [
        ("num_key_heads", c_int32),
        ("num_value_heads", c_int32),
        ("key_dim", c_int32),
        ("value_dim", c_int32),
        ("conv_size", c_int32),
        ("tiled", c_int32),
    ]


class CDeltaHalf(ctypes.Structure):
    _fields_ = [
        ("norm", c_void_p),
        ("eps", c_float),
        ("out_eps", c_float),
        ("sizes", CDeltaSizes),
        ("qkv", CMatrix),
        ("z", CMatrix),
        ("out", CMatrix),
        ("b", c_void_p),
        ("a", c_void_p),
        ("rate", c_void_p),
        ("step_bias", c_void_p),
        ("out_norm", c_void_p),
    ]


class CDeltaRun(ctypes.Structure):
    _fields_ = [
        ("start", c_int32),
        ("length", c_int32),
        ("first_out", c_int32),
        ("source", c_int32),
        ("first_store", c_int32),
        ("num_stores", c_int32),
    ]


class CDeltaStore(ctypes.Structure):
    _fields_ = [("end", c_int32), ("slot", c_int32)]


class CDeltaInputs(ctypes.Structure):
    _fields_ = [
        ("sizes", CDeltaSizes),
        ("num_runs", c_int32),
        ("reserved", c_int32),
        ("runs", POINTER(CDeltaRun)),
        ("stores", POINTER(CDeltaStore)),
        ("mixed", c_void_p),
        ("log_decay", c_void_p),
        ("beta", c_void_p),
        ("mixed_stride", c_int64),
        ("gate_stride", c_int64),
        ("conv_weight", c_void_p),
        ("windows", c_void_p),
        ("states", c_void_p),
    ]


class CContextHalf(ctypes.Structure):
    _fields_ = [
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("k", CMatrix),
        ("v", CMatrix),
        ("k_norm", c_void_p),
        ("qk_eps", c_float),
        ("reserved", c_int32),
    ]


class CChoice(ctypes.Structure):
    _fields_ = [
        ("seed", c_uint64),
        ("position", c_int64),
        ("temperature", c_float),
        ("log_min_p", c_float),
        ("top_p", c_double),
        ("top_k", c_int32),
        ("reserved", c_int32),
    ]


class CChosen(ctypes.Structure):
    _fields_ = [("index", c_int32), ("score", c_float)]


ABI = 5  # LAMPEJO_ABI of the header that the structs above mirror
_SIGNATURES = {
    "lampejo_abi": (c_int, []),
    "lampejo_isa": (c_char_p, []),
    "lampejo_force_isa": (c_int, [c_char_p]),
    "lampejo_set_threads": (None, [c_int]),
    "lampejo_get_threads": (c_int, []),
    "lampejo_packed_bytes": (c_size_t, [c_int, c_int, c_int]),
    "lampejo_pack": (c_int, [c_int, c_void_p, c_int, c_int, c_int, c_void_p, c_void_p]),
    "lampejo_unpack_rows": (None, [c_void_p, c_void_p, c_int, c_void_p]),
    "lampejo_matmul": (None, [c_void_p, c_void_p, c_int, c_void_p]),
    "lampejo_rms_norm": (None, [c_void_p, c_float, c_int, c_void_p, c_int, c_void_p]),
    "lampejo_attention_half": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "lampejo_mlp_half": (None, [c_void_p, c_void_p, c_int]),
    "lampejo_experts_half": (None, [c_void_p, c_void_p, c_int]),
    "lampejo_delta_inputs": (None, [c_void_p, c_void_p, c_int, c_void_p, c_void_p]),
    "lampejo_delta_runs": (None, [c_void_p, c_void_p]),
    "lampejo_delta_output": (None, [c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int]),
    "lampejo_context_half": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "lampejo_choose": (None, [c_void_p, c_int, c_void_p, c_void_p, c_int, c_void_p]),
    "lampejo_head_choose": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_void_p]),
    "lampejo_noise": (None, [c_void_p, c_void_p, c_int, c_void_p]),
    "lampejo_paged_attention": (None, [c_void_p, c_void_p, c_void_p, c_void_p, c_int, c_int, c_int, c_void_p]),
}


def _open() -> ctypes.CDLL | None:
    """The library, or None where it was not built.

    Raises ImportError for one that was built from other sources than these: its structs would be misread.
    """
    package = sys.modules[__package__]
    for folder in package.__path__:  # an editable install keeps the library apart from the sources
        for path in sorted((Path(folder) / "lib").glob("lampejo_kernels.*")):
            library = ctypes.CDLL(str(path))
            if not hasattr(library, "lampejo_abi") or library.lampejo_abi() != ABI:
                raise ImportError(f"{path} was built from other sources than these; install lampejo again.")
            for name, (result, arguments) in _SIGNATURES.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
            return library
    return None


LIBRARY = _open()
