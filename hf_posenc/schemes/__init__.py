"""The position-encoding schemes, one file each; importing this package registers them all.

Their classes can be imported from here: `from hf_posenc.schemes import Rope, Temperature`.
"""

from importlib import import_module
from pkgutil import iter_modules

from .base import Scheme

for _file in iter_modules(__path__):
    _module = import_module(f"{__name__}.{_file.name}")
    _classes = [each for each in vars(_module).values() if isinstance(each, type) and issubclass(each, Scheme)]
    globals().update({each.__name__: each for each in _classes if "name" in vars(each)})
