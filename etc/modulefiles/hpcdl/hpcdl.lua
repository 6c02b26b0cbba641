-- Lmod modulefile of hpcdl. `make install` fills in the words between @ signs and writes it to
-- MODULEDIR/hpcdl/<version>.lua; docs/site-guide.md says what it sets. The thread environment is left alone.

local version     = "@VERSION@"
local prefix      = "@PREFIX@"
local mpi         = "@MPI@"
local mpi_module  = "@MPI_MODULE@"
local mpi_library = "@MPI_LIBRARY@"
local root        = pathJoin(prefix, version)

help([[
hpcdl ]] .. version .. [[: distributed deep learning with Keras and TensorFlow over MPI.

    hpcdl shard IMAGES SHARDS          data -> HDF5 shards for the parallel file system
    hpcdl tune-threads --model M       measure the best threads and binding of a node
    hpcdl train --strategy ring ...    train over MPI
    hpcdl report RUN...                how fast, how accurate, how it scales

`hpcdl --help` and `man hpcdl` list the commands, each with an example. `python` is the one that can import hpcdl
and Keras, as is `hpcdl-python`. Examples are in $HPCDL_SHARE/examples, the pages in $HPCDL_DOCS.
]])

whatis("Name: hpcdl")
whatis("Version: " .. version)
whatis("Category: machine learning")
whatis("Keywords: deep learning, Keras, TensorFlow, MPI, HDF5")
whatis("Description: Distributed deep learning: shard data, tune a node, train over MPI, report how it scales")
whatis("MPI: " .. mpi)

family("hpcdl")

if (mpi_module ~= "") then
   depends_on(mpi_module)
end
if (mpi_library ~= "") then
   setenv("MPI4PY_LIBMPI", mpi_library)
end

prepend_path("PATH", pathJoin(root, "bin"))

-- `man` finds the pages by PATH where MANPATH is unset or has an empty entry. Only a list without one needs ours.
local manual  = pathJoin(root, "share/man")
local manpath = os.getenv("MANPATH") or ""
local closed  = manpath ~= "" and not (":" .. manpath .. ":"):find("::", 1, true)
if (closed or manpath:find(manual, 1, true)) then
   prepend_path("MANPATH", manual)
end

setenv("HPCDL_ROOT", root)
setenv("HPCDL_VERSION", version)
setenv("HPCDL_SHARE", pathJoin(root, "share/hpcdl"))
setenv("HPCDL_DOCS", pathJoin(root, "share/hpcdl/docs"))
setenv("HPCDL_SITE_CONFIG", pathJoin(prefix, "site.toml"))

-- Older versions of Lmod have no `complete`: then there is no completion, and nothing else is missing.
if (complete and myShellName() == "bash") then
   set_shell_function("_hpcdl_completion", [[
local IFS=$'\n'; COMPREPLY=( $(env COMP_WORDS="${COMP_WORDS[*]}" COMP_CWORD="$COMP_CWORD" _HPCDL_COMPLETE=complete_bash hpcdl 2>/dev/null) )]], "")
   complete("bash", "hpcdl", "-o default -F _hpcdl_completion")
end
