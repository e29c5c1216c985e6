"""Lets SGLang run whole on a CPU, where its kernel packages do not exist: put this folder on PYTHONPATH.

SGLang imports ``triton`` and parts of it in many modules, and decorates functions with it, but calls none of that on the plain
CPU path. And torchvision registers a fake for an operator of its C++ library, which does not load beside a CPU build of torch.
Interpreters that SGLang spawns come through here, too.

``TEST_DIE_AT=module:rank`` has that rank killed where it first imports a module.
"""

import importlib.abc
import importlib.machinery
import os
import signal
import sys
import types


class _Anything(types.ModuleType):
    """A module in which every name exists: a class where it looks like one, else a module that can be called as a decorator."""

    def __init__(self, name):
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        if name[0].isupper():
            found = types.new_class(name, exec_body=lambda body: body.update(__module__=self.__name__, __init__=_ignore))
        else:
            found = sys.modules.get(path) or _Anything(path)
        setattr(self, name, found)
        return found

    def __call__(self, *args, **kwargs):
        decorated = args[0] if len(args) == 1 and not kwargs and callable(args[0]) else None
        return decorated if decorated is not None else _unchanged

    def __iter__(self):
        return iter(())

    def __contains__(self, item):
        return False


def _ignore(self, *args, **kwargs):
    pass


def _unchanged(function):
    return function


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name == "triton" or name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name == "torchvision._meta_registrations":
            self._define_operators()
        return None

    def _define_operators(self):
        import torch

        if hasattr(torch.ops.torchvision, "nms"):
            return
        self.library = torch.library.Library("torchvision", "FRAGMENT")
        for operator in ("nms", "qnms"):
            self.library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def _die_at(module, rank):
    def heard(event, arguments):
        if event == "import" and arguments[0] == module:
            distributed = sys.modules["torch"].distributed
            if distributed.is_initialized() and distributed.get_rank() == rank:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(heard)


if "TEST_DIE_AT" in os.environ:
    _module, _, _rank = os.environ["TEST_DIE_AT"].partition(":")
    _die_at(_module, int(_rank))
