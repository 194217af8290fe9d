"""A GPU that is not there: torch's device "cuda" on a CPU build, with real values, refusals and a count of waits.

    from support import pretend_gpu; gpu = pretend_gpu.install()      # before the first use of torch.cuda; no way back
    with gpu.counting() as waits: ...                    # waits.table(): file:line → number of host-device waits

Every tensor of device "cuda:0" is a wrapper (a tensor subclass with `__torch_dispatch__`) around a tensor of the CPU.
Each operation runs on the wrapped tensors, unless CUDA would refuse it: tensors of both devices in one operation
(0-dimensional ones of the CPU in pointwise operations and CPU indices excepted), `.numpy()` of a tensor on the device,
a generator of the other device. Factories (`torch.zeros(…, device="cuda")`) come by a fallback of the dispatch key
CUDA.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import sys
from pathlib import Path

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
DEVICE = torch.device("cuda:0")
CPU = torch.device("cpu")

# Where a tensor of the CPU may meet the device's: by number of dimensions 0 (`pointwise` ones, by their tag, too) …
SCALAR_OK = {"fill_", "fill", "masked_fill", "masked_fill_", "where", "index_put", "index_put_", "_index_put_impl_"}
SCALAR_OK |= {"clamp", "clamp_", "add", "sub", "mul", "div", "copy_", "copy", "_foreach_add_", "_foreach_mul_"}
SCALAR_OK |= {"_foreach_div_", "_foreach_add", "_foreach_mul", "_foreach_div", "pow", "lerp", "lerp_", "addcmul"}
SCALAR_OK |= {"index_fill", "index_fill_", "masked_fill_.Tensor"}
# … always (they move data) …
COPIES = {"copy_", "copy", "_to_copy", "_copy_from", "_foreach_copy_", "set_"}
# … or as an index.
INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
# What waits for the device to know the size or the value of its result.
WAITS = {"_local_scalar_dense": "item", "nonzero": "nonzero", "masked_select": "mask", "equal": "item"}
WAITS |= {"_unique2": "unique", "unique_dim": "unique", "_unique": "unique", "unique_consecutive": "unique"}
WAITS |= {"bincount": "unique", "multinomial": "item", "repeat_interleave": "unique", "is_nonzero": "item"}
WAITS |= {
    "linalg_cholesky_ex": "linalg",
    "_linalg_eigh": "linalg",
    "linalg_eigh": "linalg",
    "_linalg_check_errors": "linalg",
}
RANDOM = {"random_", "uniform_", "normal_", "bernoulli_", "exponential_", "randperm", "multinomial", "bernoulli"}
RANDOM |= {"native_dropout", "randint", "rand", "randn", "cauchy_", "geometric_", "log_normal_", "poisson"}


CpuGenerator = torch.Generator


class Generator(CpuGenerator):
    """A generator of the CPU that says it is the device's."""

    def __new__(cls, device="cpu"):
        made = CpuGenerator.__new__(cls, "cpu")
        made.where = torch.device(device)
        if made.where.type == "cuda":
            target = torch.empty(1, device="cpu")
            with _Catch() as caught:  # C++ hands operations another object, always the same
                target.uniform_(generator=made)
            made.twin = caught.generator
            GPU.generators[id(made.twin)] = made.twin
        return made

    @property
    def device(self):
        return DEVICE if self.where.type == "cuda" else CPU


class _Catch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.generator = kwargs["generator"]
        return args[0]


def _of_device(generator) -> bool:
    return GPU.generators.get(id(generator)) is generator or getattr(generator, "where", CPU).type == "cuda"


class Waits:
    """Host-device waits by kind and by the line of the package that caused them."""

    def __init__(self, packages):
        self.counts, self.packages, self.bytes = collections.Counter(), packages, collections.Counter()

    def add(self, kind, func, size=0):
        frame, place, outer = sys._getframe(2), None, None
        while frame is not None:
            file = frame.f_code.co_filename
            if outer is None and "/torch/" not in file and file != __file__:
                outer = f"{Path(file).name}:{frame.f_lineno}"
            if any(f"/{package}/" in file for package in self.packages):
                place = f"{file.rpartition('/gradscope/')[2]}:{frame.f_lineno}"
                break
            frame = frame.f_back
        through = "" if place is None or outer is None or place.endswith(outer) else f" (in {outer})"
        self.counts[kind, (place or outer or "autograd thread") + through, func] += 1
        self.bytes[kind] += size

    def total(self):
        found = collections.Counter()
        for (kind, _, _), count in self.counts.items():
            found[kind] += count
        return dict(found)

    def table(self, n=25):
        return "\n".join(
            f"{c:7d}  {kind:8s} {place}  [{func}]" for (kind, place, func), c in self.counts.most_common(n)
        )


class Gpu:
    def __init__(self, packages):
        self.packages, self.waits, self.generator = packages, [], None
        self.operations, self.generators = 0, {}

    @contextlib.contextmanager
    def counting(self):
        waits = Waits(self.packages)
        waits.operations = -self.operations
        self.waits.append(waits)
        try:
            yield waits
        finally:
            self.waits.remove(waits)
            waits.operations += self.operations

    def wait(self, kind, func, size=0):
        for waits in self.waits:
            waits.add(kind, func, size)


GPU: Gpu | None = None


class OnGpu(torch.Tensor):
    """A tensor of the device: `_raw` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw, requires_grad=False):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            layout=raw.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )

    def __init__(self, raw, requires_grad=False):
        assert type(raw) is torch.Tensor, type(raw)
        self._raw = raw

    def __repr__(self, **_):
        return f"{self._raw!r}@cuda"

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(
            "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host first."
        )

    def __array__(self, *_, **__):
        return self.numpy()

    def tolist(self):
        return self.detach().cpu().tolist()

    def data_ptr(self):
        return self._raw.data_ptr()

    def untyped_storage(self):
        return self._raw.untyped_storage()

    def __reduce_ex__(self, protocol):
        rebuild = torch._utils._rebuild_device_tensor_from_cpu_tensor  # knows map_location
        return rebuild, (self.detach().cpu(), self.dtype, "cuda:0", self.requires_grad)

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            made = self.detach().clone().requires_grad_(self.requires_grad)
            if getattr(self, "_is_param", False):
                made._is_param = True
            memo[id(self)] = made
        return memo[id(self)]

    @property
    def data(self):
        return torch.Tensor.data.__get__(self)

    @data.setter
    def data(self, value):
        if not isinstance(value, OnGpu):
            raise RuntimeError("incompatible tensor type: a tensor of the CPU as .data of one on cuda")
        torch.Tensor.data.__set__(self, value)
        self._raw = value._raw

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def wrap(value, known=None):
    if type(value) is not torch.Tensor:
        return value
    if known is not None and (same := known.get(id(value))) is not None:
        if same.shape != value.shape or same.stride() != value.stride():  # resized, transposed … in place
            torch.Tensor.data.__set__(same, OnGpu(value))
        return same
    return OnGpu(value)


def fallback(func, *args, **kwargs):
    """Of the dispatch key CUDA: factories."""
    return run(func, args, kwargs)


def run(func, args, kwargs):
    gpu = GPU
    gpu.operations += 1
    name = func._schema.name.partition("::")[2]
    kwargs = dict(kwargs)
    if name == "_efficientzerotensor":  # what forward mode takes for a tangent that is not there: has no memory
        func, name = aten.zeros.default, "zeros"
    flat, spec = pytree.tree_flatten((args, kwargs))
    ours = [x for x in flat if isinstance(x, OnGpu)]
    theirs = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OnGpu)]
    target = kwargs.get("device")
    if ours and theirs:
        _check_mixture(name, func, args, kwargs, ours, theirs)
    generator = kwargs.get("generator")
    to_device = bool(ours)
    if target is not None:
        target = torch.device(target)
        to_device = target.type == "cuda"
        kwargs["device"] = target if target.type == "meta" else CPU
    if not ours and target is not None and to_device and kwargs.get("pin_memory"):
        raise RuntimeError("only dense CPU tensors can be pinned")
    if name in RANDOM or generator is not None:
        if generator is None:
            generator = next((x for x in flat if isinstance(x, torch.Generator)), None)
        on = _of_device(generator) if generator is not None else to_device
        if on != to_device:
            raise RuntimeError(
                f"Expected a '{'cuda' if to_device else 'cpu'}' device type for generator but found "
                f"'{'cuda' if on else 'cpu'}'"
            )
        if to_device and generator is None:
            return _random_default(func, args, kwargs, name)
    kind = WAITS.get(name)
    if kind is not None and not (name == "repeat_interleave" and kwargs.get("output_size") is not None):
        gpu.wait(kind, name)
    elif name in INDEXED:
        for index in args[1]:
            if index is not None:
                if index.dtype in (torch.bool, torch.uint8):
                    gpu.wait("mask", name)
                if not isinstance(index, OnGpu):
                    gpu.wait("h2d", name, index.nbytes)
    elif name == "_to_copy" and target is not None and not to_device and target.type == "cpu":
        gpu.wait("d2h" if not kwargs.get("non_blocking") else "d2h async", name, ours[0].nbytes)
    elif name in ("copy_", "_copy_from") and theirs:
        blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        source = args[1] if name == "copy_" else args[0]
        kind = ("d2h" if isinstance(source, OnGpu) else "h2d") + ("" if blocking else " async")
        gpu.wait(kind, name, source.nbytes)
    known = {id(x._raw): x for x in ours} | {id(x): x for x in theirs}
    flat = [x._raw if isinstance(x, OnGpu) else x for x in pytree.tree_leaves((args, kwargs))]
    args, kwargs = pytree.tree_unflatten(flat, spec)
    if name == "_pin_memory":
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    if name == "is_pinned":
        return False
    out = func(*args, **kwargs)
    if target is not None and not to_device:
        return out
    if isinstance(out, torch.Tensor):
        if type(out) is OnGpu:
            return out
        return wrap(out, known)
    if isinstance(out, (list, tuple)):
        return type(out)(wrap(x, known) for x in out)
    return out


def _random_default(func, args, kwargs, name):
    """Random numbers of the device's own default generator."""
    kept = torch.get_rng_state()
    torch.set_rng_state(GPU.state)
    try:
        generator = Generator("cuda")
        kwargs.pop("generator", None)
        known = {id(x._raw): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, OnGpu)}
        a, k = pytree.tree_map(lambda x: x._raw if isinstance(x, OnGpu) else x, (args, kwargs))
        out = func(*a, **k)
        del generator
        return pytree.tree_map(lambda x: wrap(x, known), out)
    finally:
        GPU.state = torch.get_rng_state()
        torch.set_rng_state(kept)


def _check_mixture(name, func, args, kwargs, ours, theirs):
    if name in COPIES:
        return
    bad = theirs
    if name in INDEXED:
        if not isinstance(args[0], OnGpu):
            raise RuntimeError(
                f"indices should be either on cpu or on the same device as the indexed tensor (cpu): {func}"
            )
        allowed = {id(i) for i in args[1] if i is not None}
        bad = [t for t in theirs if id(t) not in allowed]
    if name in SCALAR_OK or torch.Tag.pointwise in func.tags or name.startswith("_foreach"):
        bad = [t for t in bad if t.dim() > 0]
        in_place = name.endswith("_") and isinstance(args[0], torch.Tensor) and not isinstance(args[0], OnGpu)
        if bad is not theirs and not bad and in_place:  # the result is the CPU's
            bad = [args[0]]
    if bad:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! ({func}, "
            f"shapes {[tuple(t.shape) for t in ours]} on cuda, {[tuple(t.shape) for t in bad]} on cpu)"
        )


class Guard(torch._C._acc.DeviceGuard):
    def type_(self):
        return torch._C._autograd.DeviceType.CUDA


IS_BUILT, IS_AVAILABLE, HAS_PRIMARY_CONTEXT, INIT, DEVICE_COUNT, CURRENT_DEVICE = 2, 3, 4, 5, 6, 8
PINNED_ALLOCATOR, HAS_CUDA = 12, 16
"""Places of functions in the virtual table of at::CUDAHooksInterface, by the headers of torch 2.13."""


def _register_device():
    """Tell C++ that there is a device: a CPU build has no device guard for CUDA, and hooks that say that there is none.

    The guard: Python may make one for PrivateUse1; it is put into CUDA's place of c10's registry. The hooks: a copy of
    their virtual table, with functions that say yes in the places above, takes the table's place.
    """
    libraries = Path(torch.__file__).parent / "lib"
    c10, cpu = (ctypes.CDLL(str(libraries / name)) for name in ("libc10.so", "libtorch_cpu.so"))
    torch._C._acc.register_python_privateuseone_device_guard(Guard())
    registry = (ctypes.c_void_p * 21).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    cuda, own = 1, 20  # c10::DeviceType
    assert registry[cuda] is None and registry[own] is not None
    registry[cuda], registry[own] = registry[own], None

    get = cpu._ZN2at6detail12getCUDAHooksEv
    get.restype = ctypes.c_void_p
    hooks = ctypes.c_void_p.from_address(get())
    size = 64
    table = (ctypes.c_void_p * size).from_address(hooks.value - 16)  # the offset and the type come first
    copy = (ctypes.c_void_p * size)(*table)
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _: True)
    context = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_int8)(lambda *_: True)
    one = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _: 1)
    zero = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _: 0)
    places = {
        IS_BUILT: yes,
        IS_AVAILABLE: yes,
        HAS_PRIMARY_CONTEXT: context,
        DEVICE_COUNT: one,
        CURRENT_DEVICE: zero,
        HAS_CUDA: yes,
    }
    places[INIT] = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    places[PINNED_ALLOCATOR] = c10._ZN3c1015GetCPUAllocatorEv
    for place, function in places.items():
        copy[place + 2] = ctypes.cast(function, ctypes.c_void_p).value
    hooks.value = ctypes.addressof(copy) + 16
    GPU.kept = (copy, places, yes, one, zero, context)
    found = torch._C._accelerator_getAccelerator()
    assert found is not None and found.type == "cuda", (
        f"another layout of at::CUDAHooksInterface in {torch.__version__}: {found}"
    )


def _copy(self, source, non_blocking=False):
    """Where C++ leaves the dispatch key Python out, as in torch.tensor(…, device="cuda")."""
    return run(aten.copy_.default, (self, source, non_blocking), {})


def install(packages=("gradscope",)) -> Gpu:
    global GPU
    if GPU is not None:
        return GPU
    GPU = Gpu(packages)
    GPU.state = CpuGenerator().manual_seed(0).get_state()
    _register_device()
    every, own = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(fallback, "CUDA")
    own.impl("copy_", _copy, "CUDA")
    GPU.kept += (every, own)
    torch.__future__.set_swap_module_params_on_conversion(True)
    cuda = torch.cuda
    properties = type("Properties", (), {"name": "pretend", "total_memory": 80 << 30, "major": 9, "minor": 0})()
    properties.multi_processor_count = 132

    def seed(value):
        GPU.state = CpuGenerator().manual_seed(value).get_state()

    def synchronize(device=None):
        GPU.wait("sync", "torch.cuda.synchronize")

    def set_state(state, device="cuda"):
        GPU.state = state.clone()

    zero = lambda *_, **__: 0  # noqa: E731
    told = {
        "_lazy_init": lambda: None, "init": lambda: None, "is_available": lambda: True, "is_initialized": lambda: True,
        "device_count": lambda: 1, "current_device": lambda: 0, "set_device": lambda device: None,
        "synchronize": synchronize, "empty_cache": lambda: None, "manual_seed": seed, "manual_seed_all": seed,
        "get_rng_state": lambda device="cuda": GPU.state.clone(), "set_rng_state": set_state,
        "get_rng_state_all": lambda: [GPU.state.clone()], "set_rng_state_all": lambda states: set_state(states[0]),
        "get_device_properties": lambda device=None: properties, "get_device_name": lambda device=None: "pretend",
        "get_device_capability": lambda device=None: (9, 0), "is_bf16_supported": lambda *_, **__: True,
        "mem_get_info": lambda device=None: (80 << 30, 80 << 30), "memory_allocated": zero, "memory_reserved": zero,
        "max_memory_allocated": zero, "max_memory_reserved": zero, "reset_peak_memory_stats": lambda *_: None,
        "is_current_stream_capturing": lambda: False, "ipc_collect": lambda: None,
    }  # fmt: skip
    for name, function in told.items():
        setattr(cuda, name, function)
    cuda.random.manual_seed_all = seed
    cuda._is_in_bad_fork = lambda: False
    torch.Generator = Generator
    shares = torch.from_dlpack
    torch.from_dlpack = lambda tensor: tensor.clone() if isinstance(tensor, OnGpu) else shares(tensor)  # no stream
    from torch.optim import optimizer

    optimizer._foreach_supported_types.append(OnGpu)
    return GPU
