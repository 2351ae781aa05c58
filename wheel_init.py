"""Ledgerlake: Apache Pulsar ledgers in, ordered Delta tables out.

The package's rooms live under three source roots of the repository (``proto``, ``udfs``,
``streaming``). ``extend_path`` lets an editable install, which puts this file in site-packages,
still see all three.
"""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
