"""From runs to numbers: scaling, comparisons, fits, caveats. Pure."""
