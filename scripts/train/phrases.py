"""Wordings of the synthetic conversations: requests, remarks, summaries; for ``str.format``.

Fields: {fn} function, {path} file, {mod} dotted module, {arg} an argument, {new} a new name or
value, {old} an old name or value, {pkg} package, {test} test file, {n} a count.
"""

REQUESTS = {
    "docstring": [
        "Add a docstring to `{fn}` in `{path}`.",
        "`{fn}` in {path} has no docstring. Write a short one that says what it returns.",
        "Please document {fn} ({path}). One or two lines are enough.",
        "The function {fn} in {path} is undocumented; give it a docstring and nothing else.",
        "I could not tell from `{path}` what `{fn}` is for. Can you write its docstring?",
    ],
    "rename": [
        "In `{path}`, the local name `{old}` inside `{fn}` says little. Call it `{new}`.",
        "Rename the variable {old} to {new} in {fn} ({path}). Only inside that function.",
        "Please make {fn} in {path} easier to read: `{old}` should be `{new}`.",
        "{fn}() uses `{old}` where the rest of the code says `{new}`. Bring {path} in line.",
    ],
    "guard": [
        "`{fn}` in `{path}` should refuse None for `{arg}` with a ValueError.",
        "Calling {fn} with {arg}=None fails far away from the call. Add a check at the "
        "top ({path}).",
        "Please add a guard to {fn} in {path}: raise ValueError when {arg} is None.",
        "Make {fn} ({path}) fail early and clearly if {arg} is missing.",
    ],
    "hints": [
        "Add type hints to `{fn}` in `{path}`.",
        "Please annotate the arguments of {fn} ({path}); leave the body alone.",
        "mypy complains that {fn} in {path} is untyped. Add annotations that fit the defaults.",
    ],
    "log": [
        "I want a debug log line at the start of `{fn}` in `{path}` that shows `{arg}`.",
        "Please log {arg} at debug level when {fn} ({path}) is entered.",
        "Hard to trace calls of {fn} in {path}. Log its {arg} argument, debug level.",
    ],
    "bug": [
        "A test of `{fn}` fails since the last change to `{path}`. Find out why and repair it.",
        "{fn} gives wrong results. The code is in {path}. Please fix it.",
        "Something in {path} broke: see `{fn}`. Can you look at it and correct it?",
        "`python -m pytest -q {test}` fails. I think it is {fn} in {path}. Fix the code, "
        "not the test.",
        "Users report that {fn} ({path}) does the opposite of what it says. Please check.",
    ],
    "default": [
        "Change the default of `{arg}` in `{fn}` from {old} to {new} (`{path}`).",
        "In {path}, {fn} should use {arg}={new} by default instead of {old}.",
        "The default {arg}={old} of {fn} surprises people. Make it {new}; the file is {path}.",
    ],
    "explain": [
        "What does `{fn}` in `{path}` do? Do not change anything.",
        "Explain {fn} ({path}) to me in a few sentences.",
        "Where is {fn} used, and what is it for? It is defined in {path}.",
        "Before I touch {path}: what happens in {fn}?",
    ],
    "test": [
        "Write a small test for `{fn}` from `{path}` in `{test}`.",
        "There is no test for {fn}. Please add one as {test}; the code is in {path}.",
        "Add {test} with a first test that {fn} can be imported from {mod} and has the "
        "arguments it should.",
    ],
    "constant": [
        "Rename `{fn}` to `{new}` in `{path}`, with its uses in the same file.",
        "{fn} should be called {new}. Change {path}, then show me the diff.",
        "Please rename {fn} ({path}) to {new} everywhere in that file.",
    ],
    "rewrite": [
        "`{path}` is small: write it anew with a docstring on `{fn}`, and keep the rest as it is.",
        "Rewrite {path} with {fn} documented. No other change.",
        "Please give me a version of {path} in which {fn} has a docstring.",
    ],
    "method": [
        "Add a `__repr__` to the class `{fn}` in `{path}`.",
        "Objects of {fn} print badly in logs. Give the class a __repr__ ({path}).",
        "Please write a short `__repr__` for {fn} in {path}.",
    ],
}

EXTRA = [
    "",
    "",
    "",
    "",
    " Run the tests afterwards.",
    " Show me the diff when you are done.",
    " Keep the change small.",
    " Nothing else should change.",
    " Check that the file still compiles.",
    " Thanks.",
]

LOOK = [
    "I'll look at the code first.",
    "I read the function.",
    "Let me find it.",
    "I start with the definition of `{fn}`.",
    "First I look at how {fn} is written.",
    "I open {path}.",
    "Let me see what is there.",
    "I look for `{fn}`.",
    "I'll find where {fn} is defined.",
    "",
    "I want to see the present state of the file.",
    "Let me read the code around {fn} before I change anything.",
    "I search for the name first.",
]
MORE = [
    "Now the body.",
    "It is in {path}. I read it.",
    "I read the lines around it.",
    "Found it; let me read the whole function.",
    "That is the place. I print the function.",
    "I need more context.",
    "Let me see the rest of it.",
    "Now I read `{fn}` itself.",
    "",
]
CALLERS = [
    "Who calls it?",
    "I check where {fn} is used.",
    "Let me see the callers before I change it.",
    "I look for other uses of the name.",
]
EDIT = [
    "Now I make the change.",
    "I change only these lines.",
    "I replace the old block by the new one.",
    "This is a small edit.",
    "I write the new version of the function.",
    "The change is local, so I replace the text in place.",
    "Let me edit {path}.",
    "I apply it now.",
    "That is clear. I edit the function and nothing else.",
    "",
]
BUG_EDIT = [
    "The condition is the wrong way round. I correct it.",
    "Here is the mistake: `{old}` should be `{new}`.",
    "I see it: the line says `{old}`. I put it right.",
    "The fault is in one line. I replace it.",
    "`{old}` cannot be right here; I change it to `{new}`.",
]
CHECK = [
    "I check the result.",
    "Let me look at the diff.",
    "Now I verify the change.",
    "I run the tests.",
    "Does it still work?",
    "I check that the file compiles.",
    "I read the changed lines again.",
    "",
]
FAILED = [
    "The pattern did not match: let me look at the exact text.",
    "The assertion failed, so the file differs from what I typed. I read it again.",
    "No match. I print the lines as they are.",
]
REPRODUCE = [
    "I run the test to see how it fails.",
    "First the failure.",
    "Let me reproduce it.",
    "",
]
DONE = {
    "docstring": [
        "`{fn}` in `{path}` now has a docstring. Nothing else changed.",
        "I added a docstring to {fn}. The code is as before.",
        "Done: {fn} is documented in {path}.",
    ],
    "rename": [
        "Inside `{fn}` the variable is now called `{new}`. Other functions in `{path}` "
        "are untouched.",
        "I renamed {old} to {new} in {fn}; behaviour is the same.",
        "Done. {fn} uses `{new}` throughout.",
    ],
    "guard": [
        "`{fn}` now raises a ValueError when `{arg}` is None, before anything else happens.",
        "I put the check at the top of {fn} in {path}. Callers that pass a value see no change.",
        "{fn} refuses {arg}=None now.",
    ],
    "hints": [
        "The arguments of `{fn}` are annotated; the body is the same.",
        "I added type hints to {fn} in {path}, taken from its defaults.",
        "Done: {fn} is annotated.",
    ],
    "log": [
        "`{fn}` logs `{arg}` at debug level when it is entered.",
        "I added one debug line to {fn} in {path}. It costs nothing unless debug logging is on.",
    ],
    "bug": [
        "The fault was in `{fn}`: `{old}` stood where `{new}` belongs. It is corrected "
        "and the test passes.",
        "I fixed {fn} in {path}. One line was wrong: `{old}` instead of `{new}`.",
        "Repaired. The line in {fn} reads `{new}` again, and the tests pass.",
    ],
    "default": [
        "`{arg}` of `{fn}` now defaults to {new}. Callers that pass the argument are not affected.",
        "Changed: the default is {new} instead of {old}, in {path}.",
    ],
    "test": [
        "`{test}` holds a first test for `{fn}`, and it passes.",
        "I wrote {test}. It imports {fn} from {mod} and checks its arguments; it passes.",
    ],
    "constant": [
        "`{fn}` is now `{new}` in `{path}`, in {n} places.",
        "I renamed {fn} to {new}. There were {n} lines to change, all in {path}.",
    ],
    "rewrite": [
        "I wrote `{path}` anew with a docstring on `{fn}`; all other lines are the same.",
        "{path} is rewritten. Only the docstring of {fn} is new.",
    ],
    "method": [
        "The class `{fn}` has a `__repr__` now, which shows its main attributes.",
        "I added __repr__ to {fn} in {path}; printing such an object now says what it holds.",
    ],
}
FOLLOW = [
    "Good. Next: ",
    "Thank you. One more thing: ",
    "Fine. Now this: ",
    "",
    "Also: ",
    "And then: ",
    "Next one. ",
]
VERBS = {
    "get": "Return",
    "is": "Tell whether",
    "has": "Tell whether there is",
    "set": "Set",
    "make": "Make",
    "create": "Create",
    "build": "Build",
    "parse": "Parse",
    "read": "Read",
    "write": "Write",
    "load": "Load",
    "save": "Save",
    "check": "Check",
    "validate": "Check",
    "to": "Convert to",
    "from": "Build from",
    "add": "Add",
    "remove": "Remove",
    "delete": "Delete",
    "update": "Update",
    "run": "Run",
    "compute": "Compute",
    "find": "Find",
    "format": "Format",
    "convert": "Convert",
    "handle": "Handle",
    "process": "Process",
    "init": "Set up",
    "test": "Test",
    "print": "Print",
    "render": "Render",
    "resolve": "Resolve",
    "visit": "Visit",
}
