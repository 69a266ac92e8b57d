"""The structures of optimizer.cpp by which the compiled step gets weights, gradients, state and options."""

from __future__ import annotations

import ctypes

SCALARS = 8  # that a parameter's step takes beside its tensors


class Tensors(ctypes.Structure):
    """One parameter with its gradient, state and scalars, as optimizer.cpp reads them."""

    _fields_ = [
        ("param", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("state", ctypes.c_void_p * 3),
        ("count", ctypes.c_int64),
        ("scalar", ctypes.c_float * SCALARS),
        ("wire", ctypes.c_void_p),
        ("wire_type", ctypes.c_int32),
        ("wire_has_nan", ctypes.c_int32),
        ("grad_type", ctypes.c_int32),
        ("factor", ctypes.c_float),
    ]


class Request(ctypes.Structure):
    """One step of several parameters, as optimizer.cpp reads it."""

    _fields_ = [
        ("tensors", ctypes.POINTER(Tensors)),
        ("count", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("flags", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("done", ctypes.c_int32),
    ]
