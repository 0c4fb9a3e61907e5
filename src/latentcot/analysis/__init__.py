"""Where a model thinks, and what it brings: data, figures and pages."""
