"""A CUDA driver that launches nothing: Triton's own launcher runs against it on any machine with a C compiler.

`libcuda.so.1` is replaced by a few functions that succeed, and a `cuLaunchKernelEx` that counts. So host code is tested
down to the last instruction before a real driver.

There are several devices. As with a real driver each thread has a current one, a kernel belongs to the one it was
loaded on and a stream from STREAMS on to one of STREAMS each; neither can be used while another device is current.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["STREAMS", "FakeCuda", "fake_cuda"]

SOURCE = r"""
#include <stdint.h>
#include <stddef.h>
#include <string.h>
typedef struct { unsigned grid[3], block[3], shared; void *stream, *attributes; unsigned count; } Config;
enum { MAX_LOG = 64, STREAMS = 1000, FIRST_FUNCTION = 16 };
static __thread int current;
static struct { uint64_t device, stream; } history[MAX_LOG];
static unsigned refusals, launches;
void fake_expect(void) { launches = 0; }
unsigned fake_launches(void) { return launches; }
int fake_device(int device) { int old = current; if (device >= 0) current = device; return old; }
void* fake_history(void) { return history; }
void fake_refuse(unsigned count) { refusals = count; }
int cuLaunchKernelEx(const Config* config, void* function, void** params, void** extra) {
  uint64_t handle = (uint64_t)config->stream;
  if (refusals) { refusals--; return 201; }
  if ((uint64_t)function != FIRST_FUNCTION + current) return 400;
  if (handle >= STREAMS && handle / STREAMS != current + 1) return 400;
  if (launches < MAX_LOG) { history[launches].device = current; history[launches].stream = handle; }
  launches++;
  return 0;
}
int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* shape,
                           const uint64_t* strides, const unsigned* box) {
  memset(map, 0, 128); memcpy(map, &address, 8); memcpy((char*)map + 8, shape, 8 * rank);
  memcpy((char*)map + 48, strides, 8 * (rank - 1)); return 0;
}
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)(uint64_t)(1 + current); return 0; }
int cuCtxSetCurrent(void* context) { current = (int)(uint64_t)context - 1; return 0; }
int cuCtxGetDevice(int* device) { *device = current; return 0; }
int cuModuleUnload(void* module) { return 0; }
int cuStreamIsCapturing(void* stream, int* status) { *status = 0; return 0; }
int cuDeviceGet(int* device, int index) { *device = index; return 0; }
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(uint64_t)(1 + device); return 0; }
int cuModuleLoadData(void** module, const void* data) { *module = (void*)(uint64_t)(1 + current); return 0; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  *function = (void*)((uint64_t)module - 1 + FIRST_FUNCTION); return 0;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) { *value = 1024; return 0; }
int cuFuncSetAttribute(void* function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void* function, int config) { return 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) { *value = 232448; return 0; }
int cuPointerGetAttribute(void** data, int attribute, void* pointer) { *data = pointer; return 0; }
int cuCtxGetLimit(size_t* value, int limit) { *value = 0; return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuGetErrorString(int code, const char** text) { *text = "fake"; return 0; }
"""
MAX_LOG, STREAMS = 64, 1000


class FakeCuda:
    """The handle of a test on the driver."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_history.restype = ctypes.c_void_p

    def expect(self) -> None:
        """Start counting."""
        self._library.fake_expect()

    @property
    def launches(self) -> int:
        """Launches since `expect`."""
        return int(self._library.fake_launches())

    def device(self) -> int:
        """The one that is current in this thread."""
        return int(self._library.fake_device(-1))

    def exchange_device(self, index: int) -> int:
        """Make another one current unless the index is negative; the one that was."""
        return int(self._library.fake_device(index))

    def launched_on(self) -> list[tuple[int, int]]:
        """(device, stream) of the launches since `expect`, at most MAX_LOG."""
        pairs = ((ctypes.c_uint64 * 2) * MAX_LOG).from_address(self._library.fake_history())
        return [(device, stream) for device, stream in pairs[: self.launches]]

    def refuse(self, count: int) -> None:
        """The next launches fail: no context is current."""
        self._library.fake_refuse(count)


@contextlib.contextmanager
def installed(folder: Path) -> Iterator[FakeCuda]:
    """Triton launches into the fake driver within the block."""
    import triton
    from triton.backends.nvidia.driver import CudaDriver

    path = folder / "libcuda.so.1"
    if not path.exists():
        (folder / "cuda.c").write_text(SOURCE)
        options = ("-shared", "-fPIC", "-w", "-O1", "-Wl,-soname,libcuda.so.1")
        subprocess.run(["gcc", *options, "-o", str(path), str(folder / "cuda.c")], check=True)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    with triton.knobs.nvidia.scope():
        triton.knobs.nvidia.libcuda_path = str(folder)
        fake = FakeCuda(library)
        driver = CudaDriver()
        driver.get_current_device = fake.device
        driver.get_current_stream = lambda _: 7
        driver.get_device_capability = lambda _: (9, 0)
        triton.runtime.driver.set_active(driver)
        yield fake
        triton.runtime.driver._active = None


@pytest.fixture(scope="session")
def fake_cuda(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeCuda]:
    """The fake driver, if it can be built here."""
    triton = pytest.importorskip("triton")
    if shutil.which("gcc") is None:
        pytest.skip("no C compiler")
    if bool(triton.knobs.runtime.interpret):
        pytest.skip("kernels are interpreted, not launched")
    # One for all files of tests: Triton's launchers are linked to the first one in the process.
    folder = tmp_path_factory.getbasetemp() / "cuda"
    folder.mkdir(exist_ok=True)
    with installed(folder) as fake:
        yield fake
