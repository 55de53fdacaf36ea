"""Beside pyproject.toml, where `make_wheel.py` builds: a wheel for one platform, and for any Python on it."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class _WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        return True


class _AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        # The libraries are loaded with ctypes, and know nothing of Python.
        return ("py3", "none", super().get_tag()[2])


setup(distclass=_WithLibraries, cmdclass={"bdist_wheel": _AnyPython})
