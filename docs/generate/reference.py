"""The pages of docs/reference, each from the code that it describes: ``python -m docs.generate.reference``."""

from pathlib import Path

from docs.generate import (
    api_page,
    cli_page,
    engines_page,
    errors_page,
    faults_page,
    json_page,
    ops_by_vendor,
    ops_page,
    settings_page,
)

FOLDER = Path(__file__).parents[1] / "reference"
PAGES = {
    module.NAME: module.document
    for module in (
        api_page,
        cli_page,
        engines_page,
        errors_page,
        faults_page,
        json_page,
        ops_by_vendor,
        ops_page,
        settings_page,
    )
}


def main() -> None:
    for name, document in PAGES.items():
        (FOLDER / name).write_text(document())
    print(f"docs/reference: {', '.join(sorted(PAGES))}")


if __name__ == "__main__":
    main()
