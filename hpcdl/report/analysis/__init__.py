"""From runs to numbers: scaling, comparisons, fits, caveats. All functions are pure."""
