"""A foreign call of our own, which takes a while and then may fail: `check(x)`.

It is what makes waiting visible on the CPU. JAX runs a program with a host callback synchronously
there, but one with a foreign call, beside enough arithmetic, it lets run on.
"""

import ctypes
import pathlib
import shutil
import subprocess
import tempfile

import jax
import pytest

_SOURCE = r"""
#include <chrono>
#include <cstring>
#include <thread>
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;

static ffi::Error Check(ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y) {
  std::this_thread::sleep_for(std::chrono::milliseconds(30));
  if (x.typed_data()[0] < 0)
    return ffi::Error(ffi::ErrorCode::kInvalidArgument, "a negative number");
  std::memcpy(y->typed_data(), x.typed_data(), x.size_bytes());
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    check, Check,
    ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")

_registered = False


def check(x, name="eqxjit_check"):
    """`x`; fails at runtime, after a while, if its first element is negative."""
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return jax.ffi.ffi_call(name, result, vmap_method="broadcast_all")(x)


def register():
    """Compiles the foreign function and tells JAX of it, once per process."""
    global _registered
    if _registered:
        return
    with tempfile.TemporaryDirectory() as folder:
        source, library = pathlib.Path(folder, "check.cc"), pathlib.Path(folder, "check.so")
        source.write_text(_SOURCE)
        command = ["g++", "-std=c++17", "-w", "-shared", "-fPIC", "-I", jax.ffi.include_dir()]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        handler = ctypes.CDLL(str(library)).check
    jax.ffi.register_ffi_target("eqxjit_check", jax.ffi.pycapsule(handler), platform="cpu")
    _registered = True
