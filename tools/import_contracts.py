"""A contract for import-linter: packages that compute, and do nothing else."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from importlinter import Contract, ContractCheck, fields, output

if TYPE_CHECKING:
    from grimp import ImportGraph


class PureContract(Contract):
    """The modules import no third party, and none of the impure parts of the standard library.

    The built-in "forbidden" contract needs each module to exist and each third party to be named; this one
    covers modules that do not exist yet and third parties that nobody has thought of.
    """

    type_name = "pure"

    # Declared as fields, sets of strings once import-linter has read the configuration.
    modules: Any = fields.SetField(subfield=fields.StringField())
    impure: Any = fields.SetField(subfield=fields.StringField())
    allowed: Any = fields.SetField(subfield=fields.StringField(), required=False)  # "tidegate._policy -> yaml"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:  # noqa: ARG002, FBT001 - import-linter's signature
        """Look at direct imports only: what a lower layer does is that layer's business."""
        wrong = []
        for package in self.modules:
            for module in (name for name in graph.modules if f"{name}.".startswith(f"{package}.")):
                for imported in graph.find_modules_directly_imported_by(module):
                    top = imported.partition(".")[0]
                    foreign = top not in sys.stdlib_module_names | {"tidegate"}
                    if top in self.impure or (foreign and f"{package} -> {top}" not in (self.allowed or ())):
                        wrong.append(f"{module} imports {top}")
        return ContractCheck(kept=not wrong, metadata={"wrong": sorted(wrong)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """One line for each import."""
        for line in check.metadata["wrong"]:
            output.print_error(f"{line}: pure modules take such things as arguments")
